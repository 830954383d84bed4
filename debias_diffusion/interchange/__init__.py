"""Import and export of encoders in the formats that people load."""
