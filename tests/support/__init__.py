"""What the tests share: loops, servers, clusters and flow processes."""
