"""Send requests over HTTP to servers: rewards, judges, retrievers, tools and environments.

The package sends requests, retries them and applies deadlines. The callers define the content of requests and
read the answers.
"""
