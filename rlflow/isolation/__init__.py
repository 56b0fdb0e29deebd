"""What a process that handles text of strangers or models may do: its environment, its limits, and the kernel's walls around it."""
