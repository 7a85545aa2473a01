"""Modules that serving engines call: plug-ins, and modules with the surface of packages that engines import."""
