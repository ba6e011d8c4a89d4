"""The Prefect side: the task and its retries, cancellation, the publisher, events and automations."""
