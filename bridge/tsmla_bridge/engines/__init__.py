"""What serving engines call: modules with the surface of packages that engines import."""
