"""From figures to pages: summary.json, summary.md, report.html, and the two commands that write and compare them."""
