"""What the Makefile and CI call; not part of what is installed. Each is a program: `python -m tools.NAME`.

install.py     a set-up into an environment: which build of PyTorch, how large, then pip
resolve.py     what pip would install, here or on another machine, from metadata alone
check_pins.py  whether constraints.txt can be installed from the public index on every platform
run_tests.py   pytest, several times, with one line about all of it at the end
"""
