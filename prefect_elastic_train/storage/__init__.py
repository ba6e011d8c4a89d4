"""How bytes are kept: a directory or an object store behind one protocol, with retries and classes of faults."""
