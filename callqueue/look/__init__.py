"""The look: where every rule stands at one moment. All pages, commands and metrics render it."""

from callqueue.look.limits import LimitLook as LimitLook
from callqueue.look.model import HoldLook as HoldLook
from callqueue.look.model import Look as Look
from callqueue.look.model import RuleLook as RuleLook
from callqueue.look.notes import Note as Note
from callqueue.look.notes import notes as notes
from callqueue.look.read import look as look
