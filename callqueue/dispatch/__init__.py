"""The dispenser: releases calls as fast as the limits allow, and hands them to Celery."""
