"""A small model hub for clusters that cannot reach the public one."""
