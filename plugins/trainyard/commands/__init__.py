"""The commands of `trainyard`, one module a noun; `trainyard.cli` holds the command line itself."""
