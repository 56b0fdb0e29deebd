"""The graph of an algorithm: data, drawings, bytes and differences."""
