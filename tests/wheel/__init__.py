"""What is installed from a wheel: built here once, and used without a compiler."""
