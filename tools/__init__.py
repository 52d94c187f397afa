"""Programs for developers: the environment, the demo, engines on this machine. Not part of the wheel."""
