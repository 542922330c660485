"""What touches machines: the playbooks' driver, the lab, the commands that look at a host."""
