"""Releases and model servers; never imports airflow, nor trainers."""
