"""Text that does not fit into memory: streams of documents, their order, and their tokens."""
