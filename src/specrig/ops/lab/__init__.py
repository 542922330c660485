"""The lab: a nested LXC host and guest with a simulated NVIDIA driver, to try everything on."""
