"""The machine that runs the program: folders, and bars on its terminal."""
