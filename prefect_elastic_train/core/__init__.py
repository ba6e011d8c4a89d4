"""Values that are said between processes: settings, requests, events, records, outcomes."""
