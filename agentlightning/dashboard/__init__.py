"""The dashboard of a store server: its built files, and its data beyond the store's operations.

The source of the dashboard is in `dashboard/` at the root of the repository; `static/` here is its build output. A
store server mounts this package through the hook in `agentlightning/store/http/mounts.py`.
"""
