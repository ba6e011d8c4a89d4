"""The Prefect side, in the flow process: the task and its retries, cancellation, the publisher, events, automations."""
