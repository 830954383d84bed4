"""Studies of this package: settings of `reproduce`; scripts, `python -m research.studies.NAME`, for what needs more."""
