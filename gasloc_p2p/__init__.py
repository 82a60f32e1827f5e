"""Peer-to-peer language-model training with local steps, random gossip and outer momentum."""

__version__ = "0.1.0"
