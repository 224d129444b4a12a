"""The machine that runs the program: folders, JSON files, commands, bars on a terminal, quiet."""
