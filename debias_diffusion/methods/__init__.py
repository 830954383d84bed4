"""Training methods: which captions a model learns from, and which losses. One file a method."""
