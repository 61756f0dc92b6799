"""From the two doors to the path that serves a call: arguments, validation, the custom ops, and the torch path (the reference)."""
