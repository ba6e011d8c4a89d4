"""Values that are said between processes: settings, requests, events, records, outcomes. Nothing here does I/O."""
