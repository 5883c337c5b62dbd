"""How messages travel: gloo with one thread, stand-ins for process groups, low precision."""
