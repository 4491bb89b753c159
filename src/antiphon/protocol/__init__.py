"""Every message that crosses a process, its codec and its limits."""
