"""The configuration files, as a package."""
