"""How the models of the toy world that ship with the package are made: `python -m research toymodels`."""
