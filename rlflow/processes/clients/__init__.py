"""HTTP requests to servers: rewards, judges, retrievers, tools and environments.

This package sends requests, retries them and applies deadlines. Its callers define the content of requests
and read the answers.
"""
