"""What a release consists of, and how it is built. `python -m tools.release` writes it to dist/.

Each module makes one part from files of the repository and values that it is given: no module but
`__main__` reads the clock, the environment or git.
"""
