"""Rules for well-known providers: `Rule(**providers.github_read())`.

Each function returns the fields of a Rule: hosts, limits, retries, and where the provider throttles
in a way of its own, a `classify` and a `settle`. Its arguments are what differs by plan; any field
of a Rule may be given too, and replaces the provider's. Numbers age: docs/how-to/providers.md has
each with its source and date. Pure: settings import it.
"""

from callqueue.providers.business import (
    airtable,
    hubspot,
    hubspot_search,
    notion,
    quickbooks,
    quickbooks_batch,
    salesforce,
    shopify_graphql,
    shopify_rest,
    spapi,
    stripe_pay,
    stripe_read,
    xero,
    zendesk,
    zendesk_update,
)
from callqueue.providers.costs import github_route
from callqueue.providers.language_models import anthropic, gemini, openai
from callqueue.providers.messaging import (
    discord,
    plivo_api,
    plivo_sms,
    plivo_voice,
    sendgrid,
    ses,
    slack,
    slack_post,
    slack_webhook,
    twilio_sms,
    twilio_voice,
    whatsapp,
)
from callqueue.providers.platforms import (
    cloudflare,
    github_read,
    github_write,
    meta_graph,
    microsoft_graph,
    microsoft_outlook,
    youtube,
    youtube_search,
)

__all__ = [
    "airtable",
    "anthropic",
    "cloudflare",
    "discord",
    "gemini",
    "github_read",
    "github_route",
    "github_write",
    "hubspot",
    "hubspot_search",
    "meta_graph",
    "microsoft_graph",
    "microsoft_outlook",
    "notion",
    "openai",
    "plivo_api",
    "plivo_sms",
    "plivo_voice",
    "quickbooks",
    "quickbooks_batch",
    "salesforce",
    "sendgrid",
    "ses",
    "shopify_graphql",
    "shopify_rest",
    "slack",
    "slack_post",
    "slack_webhook",
    "spapi",
    "stripe_pay",
    "stripe_read",
    "twilio_sms",
    "twilio_voice",
    "whatsapp",
    "xero",
    "youtube",
    "youtube_search",
    "zendesk",
    "zendesk_update",
]
