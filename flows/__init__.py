"""Deployable example flows: a pipeline that reads handwritten digits, and a flow that runs any train loop."""
