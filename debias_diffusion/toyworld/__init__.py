"""The toy world: scenes of a few objects with long captions, in which the whole chain runs on a laptop."""
