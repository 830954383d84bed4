"""How the models of the toy world that ship with the package were trained."""
