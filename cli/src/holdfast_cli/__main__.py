"""`kubectl holdfast`, which is the program `holdfast` with words that are objects of the cluster."""

from holdfast_cli.program import main

if __name__ == "__main__":
    main()
