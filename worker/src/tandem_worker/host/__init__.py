"""What a process has from its machine: environment, devices, threads, connections, isolated processes."""
