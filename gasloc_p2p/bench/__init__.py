"""How fast codecs and streams are on this machine (docs/bench.md)."""
