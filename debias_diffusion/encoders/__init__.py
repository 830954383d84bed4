"""One name, one model, one folder: encoders as people name them, loaded, and written in the formats that they load."""
