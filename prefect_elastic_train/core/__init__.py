"""Values without I/O for all processes: settings, requests, events, records, outcomes."""
