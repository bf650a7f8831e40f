"""Mutants that change nothing that anybody promises, as `python -m tests.mutants --list` shows
them, and why.
"""

_BY_REASON = {
    "Of two fields that are wrong, either may be named first.": [
        "permits/asking.py Options.as_wanted: request = intake.CallRequest(None, key=self.key, cost=self.cost, priority=priority) label, usual = _checked_label(self.label), config.begun_lease(rule) -> label, usual = (_checked_label(self.label), config.begun_lease(rule)) request = intake.CallRequest(None, key=self.key, cost=self.cost, priority=priority)",
        "limits/rules.py Breaker.__post_init__: _check_number(self, \"factor\", 1, 100) _check_seconds(self, \"longest\", 0.1, 86400) -> _check_seconds(self, 'longest', 0.1, 86400) _check_number(self, 'factor', 1, 100)",
        "limits/rules.py Breaker.__post_init__: _check_seconds(self, \"hold\", 0.1, 86400) _check_number(self, \"factor\", 1, 100) -> _check_number(self, 'factor', 1, 100) _check_seconds(self, 'hold', 0.1, 86400)",
        "limits/rules.py Breaker.__post_init__: _check_seconds(self, \"within\", 0.1, 86400) _check_seconds(self, \"hold\", 0.1, 86400) -> _check_seconds(self, 'hold', 0.1, 86400) _check_seconds(self, 'within', 0.1, 86400)",
        "limits/rules.py Breaker.__post_init__: _check_whole(self, \"failures\", 1, 10_000) _check_seconds(self, \"within\", 0.1, 86400) -> _check_seconds(self, 'within', 0.1, 86400) _check_whole(self, 'failures', 1, 10000)",
        "limits/rules.py Retry.__post_init__: _check_number(self, \"factor\", 1, 100) _check_seconds(self, \"cap\", 0, 30 * 86400) -> _check_seconds(self, 'cap', 0, 30 * 86400) _check_number(self, 'factor', 1, 100)",
        "limits/rules.py Retry.__post_init__: _check_seconds(self, \"base\", 0, 86400) _check_number(self, \"factor\", 1, 100) -> _check_number(self, 'factor', 1, 100) _check_seconds(self, 'base', 0, 86400)",
        "limits/rules.py Retry.__post_init__: _check_seconds(self, \"cap\", 0, 30 * 86400) _check_seconds(self, \"max_hold\", 0, 366 * 86400) -> _check_seconds(self, 'max_hold', 0, 366 * 86400) _check_seconds(self, 'cap', 0, 30 * 86400)",
        "limits/rules.py Retry.__post_init__: _check_seconds(self, \"max_hold\", 0, 366 * 86400) _check_flag(self, \"jitter\") -> _check_flag(self, 'jitter') _check_seconds(self, 'max_hold', 0, 366 * 86400)",
        "limits/rules.py Retry.__post_init__: _check_whole(self, \"max_attempts\", 1, 1000) _check_whole(self, \"max_rate_limited\", 0, 100_000) -> _check_whole(self, 'max_rate_limited', 0, 100000) _check_whole(self, 'max_attempts', 1, 1000)",
        "limits/rules.py Retry.__post_init__: _check_whole(self, \"max_rate_limited\", 0, 100_000) _check_seconds(self, \"base\", 0, 86400) -> _check_seconds(self, 'base', 0, 86400) _check_whole(self, 'max_rate_limited', 0, 100000)",
        "limits/rules.py Rule.__post_init__: _check_whole(self, \"priority\", -32768, 32767) _check_idempotency(self) -> _check_idempotency(self) _check_whole(self, 'priority', -32768, 32767)",
    ],
    "One of the two only computes.": [
        "ledger/account.py Account.note_room: is_open = {rule: self.open_by_rule[rule] for rule in self.rules} print_ = memo.budgets_fingerprint(tuple(budgets)) -> print_ = memo.budgets_fingerprint(tuple(budgets)) is_open = {rule: self.open_by_rule[rule] for rule in self.rules}",
        "ledger/tally_rows.py _left_sql: column, (cost, of_cost) = _value_column(using, leaving.budget), _cost_sql(using, leaving.budget) since, by, told_apart = _parameters(using, leaving.begin, leaving.ahead, leaving.end) -> since, by, told_apart = _parameters(using, leaving.begin, leaving.ahead, leaving.end) column, (cost, of_cost) = (_value_column(using, leaving.budget), _cost_sql(using, leaving.budget))",
        "limits/in_force.py _in_words: usual = {f.name: f.default for f in fields(kind)} if kind else {} main = data.get(\"rate\", data.get(\"n\")) -> main = data.get('rate', data.get('n')) usual = {f.name: f.default for f in fields(kind)} if kind else {}",
        "transitions/verbs.py record: database.update_each(tables.CallQueue, using, ended) others = [one for one in results if one.job.call.id not in locked.calls] -> others = [one for one in results if one.job.call.id not in locked.calls] database.update_each(tables.CallQueue, using, ended)",
        "ledger/ready_calls.py _lock_calls: columns = _candidate_columns(using) source = f\"{tables.name(using, 'CallQueue')} c\" -> source = f\"{tables.name(using, 'CallQueue')} c\" columns = _candidate_columns(using)",
        "dispatch/choosing.py choose: made.unfit = unfit gone = Counter(call.rule for call in made.releases) -> gone = Counter((call.rule for call in made.releases)) made.unfit = unfit",
        "execution/claim.py _columns_when_begun: started_at = from_us(job.clock.at) seconds = max(0.0, job.lease_ends_at - job.clock.before) -> seconds = max(0.0, job.lease_ends_at - job.clock.before) started_at = from_us(job.clock.at)",
        "transitions/verbs.py lose: lost.update(finished_at=locked.now, outcome=LOST, error_message=why) rows = [ ends.with_later_changes(columns_of_call(one, locked.wall), as_ending(one.job.call)) for one in results ] -> rows = [ends.with_later_changes(columns_of_call(one, locked.wall), as_ending(one.job.call)) for one in results] lost.update(finished_at=locked.now, outcome=LOST, error_message=why)",
        "ledger/tallies.py _apply_correction: charged, cost = cost_of(correction.charged, unit), cost_of(correction.cost, unit) correct = tallies.correct_settled if correction.settled else tallies.correct -> correct = tallies.correct_settled if correction.settled else tallies.correct charged, cost = (cost_of(correction.charged, unit), cost_of(correction.cost, unit))",
        "ledger/settings.py Party._look_for_silent: held = tables.opinions(self.using).filter(lapsed_at=None) moment = time.monotonic() -> moment = time.monotonic() held = tables.opinions(self.using).filter(lapsed_at=None)",
        "dispatch/dispenser.py Dispenser._seconds_to_next_turn: now = time.monotonic() wakes = [self._poll_at, self.chores.next_round_at] -> wakes = [self._poll_at, self.chores.next_round_at] now = time.monotonic()",
        'ledger/tally_rows.py ended_parts: sql = ( f"SELECT {column}, MAX(finished_at), SUM({cost}) FROM {tables.name(using, \'CallAttempt\')} " f"WHERE ({of_rules}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s " "AND NOT (correction_pending AND NOT settled) " f"GROUP BY {column}, {database.part_sql(using, \'finished_at\', begin, width)} ORDER BY 2" ) instants = _parameters(using, begin, end) -> instants = _parameters(using, begin, end) sql = f"SELECT {column}, MAX(finished_at), SUM({cost}) FROM {tables.name(using, \'CallAttempt\')} WHERE ({of_rules}) AND finished_at > %s AND finished_at <= %s AND outcome <> %s AND NOT (correction_pending AND NOT settled) GROUP BY {column}, {database.part_sql(using, \'finished_at\', begin, width)} ORDER BY 2"',
        "execution/request.py _columns_of_body: most = conf.current().kept_response_bytes(result.job.rule) size = min(len(content) + (not result.is_whole), LONGEST_SIZE) -> size = min(len(content) + (not result.is_whole), LONGEST_SIZE) most = conf.current().kept_response_bytes(result.job.rule)",
        "dispatch/release_pass.py charge: transitions.release(account.using, rest, wall, is_lazy=not mine) reads = None if taker is None else _columns_of_calls(account.using, taker.reads) -> reads = None if taker is None else _columns_of_calls(account.using, taker.reads) transitions.release(account.using, rest, wall, is_lazy=not mine)",
        "transitions/verbs.py void.<locals>.work: _void_locked(using, [pair.attempt.pk for pair in pairs]) back = [pair.call.pk for pair in pairs if pair.call] -> back = [pair.call.pk for pair in pairs if pair.call] _void_locked(using, [pair.attempt.pk for pair in pairs])",
        "execution/executor.py _Execution.make_calls: make = telemetry.traced(request.make) self._record([judging.result_of_unfit(job) for job in self.jobs if job.unfit is not None]) -> self._record([judging.result_of_unfit(job) for job in self.jobs if job.unfit is not None]) make = telemetry.traced(request.make)",
        "ledger/tally_rows.py ended_parts: width = max(1, budget.limit.window_us // PARTS) where, of_former = _conditions_of_former(using, budget) -> where, of_former = _conditions_of_former(using, budget) width = max(1, budget.limit.window_us // PARTS)",
    ],
    "Neither of the two has to do with the other.": [
        "dispatch/turns.py KeysInTurn._give_and_wake_turns: self._is_mid_round |= bool(memo.gathering) self._is_mid_round |= ready_calls.take_news(self.using, self.in_turn, self.now) -> self._is_mid_round |= ready_calls.take_news(self.using, self.in_turn, self.now) self._is_mid_round |= bool(memo.gathering)",
        "ledger/tallies.py Tallies._add_charged_by_former: self.tally_of(value).used += cost self.kept.has_former = True -> self.kept.has_former = True self.tally_of(value).used += cost",
        "dispatch/dispenser.py Dispenser.tick: self.chores.maintain_if_due() self._poll_ready_if_due() -> self._poll_ready_if_due() self.chores.maintain_if_due()",
        "sending/intake.py insert: _insert_one(call, using) _insert_key_news([call], using) -> _insert_key_news([call], using) _insert_one(call, using)",
        "permits/waiting.py Waiter._look_at_row: reading = ledger_time.watch(self.using).last shown = self.due_at -> shown = self.due_at reading = ledger_time.watch(self.using).last",
        "ledger/account.py Account.read: self.read_tallies(has_corrections) self._read_open() -> self._read_open() self.read_tallies(has_corrections)",
        "permits/transport.py PermitAdapter.__init__: self._options = Options(rule, key, cost, priority, wait, lease, label) super().__init__(**of_adapter) -> super().__init__(**of_adapter) self._options = Options(rule, key, cost, priority, wait, lease, label)",
        "execution/flight.py Flight._do_round: self.told_at = time.monotonic() ended = {id(job) for job, _ in list(self.crew.ended)} -> ended = {id(job) for job, _ in list(self.crew.ended)} self.told_at = time.monotonic()",
        "dispatch/planning.py _Planner._keep_back: self.made.wait |= Wait(on_answer=self._may_open_sooner(budget)) self._shut.add((budget.id, value)) -> self._shut.add((budget.id, value)) self.made.wait |= Wait(on_answer=self._may_open_sooner(budget))",
        "execution/flight.py Flight._begin_waiting: message.count += len(begun) message.begun_at = time.monotonic() -> message.begun_at = time.monotonic() message.count += len(begun)",
        "execution/flight.py Flight._let_tasks_go: self.boarding.remove(message) message.settled.set() -> message.settled.set() self.boarding.remove(message)",
        "execution/connection.py Connection._transmit: self.is_whole = self.is_resting = False # Ahead of the send: what strikes from outside, such as a task's time limit, must not find # it unmarked. gate.sent_at = monotonic() -> gate.sent_at = monotonic() self.is_whole = self.is_resting = False",
        "ledger/settings.py Party.heartbeat: rule_rows.ensure(self.using, self.book.rules if self.book else ()) now = ledger_time.now(self.using) -> now = ledger_time.now(self.using) rule_rows.ensure(self.using, self.book.rules if self.book else ())",
        "sending/importer.py send_file: transaction.set_rollback(True, using=using) done.sent = 0 -> done.sent = 0 transaction.set_rollback(True, using=using)",
        "ledger/tallies.py Tallies.__init__: self.is_anew, self._has_advanced = believed is None, False self.kept = believed or Kept(self.print, self.horizon(), now) -> self.kept = believed or Kept(self.print, self.horizon(), now) self.is_anew, self._has_advanced = (believed is None, False)",
        "dispatch/release_pass.py _read_account_and_holds: account.read(has_corrections=any(row.is_corrected for row in locked.rows.values())) held = holds.in_force(locked.using, locked.group, from_us(locked.now)) -> held = holds.in_force(locked.using, locked.group, from_us(locked.now)) account.read(has_corrections=any((row.is_corrected for row in locked.rows.values())))",
        "dispatch/next_look.py RuleGroup.notice_answers: self.next_look = replace(look, open_attempts=open_attempts, untold_attempts=untold) self.look_at = 0.0 -> self.look_at = 0.0 self.next_look = replace(look, open_attempts=open_attempts, untold_attempts=untold)",
        "dispatch/dispenser.py Dispenser.__init__: self.outbox = Outbox(using, publish, self._broker_refused) self.settings = settings -> self.settings = settings self.outbox = Outbox(using, publish, self._broker_refused)",
        "dispatch/dispenser.py Dispenser._release: taker = None if self.maker is None else self.maker.taker() room = ROOMY if self.maker is None else self._room(self.maker) -> room = ROOMY if self.maker is None else self._room(self.maker) taker = None if self.maker is None else self.maker.taker()",
        'ledger/ready_calls.py give_missing_news: source, params = database.distinct_pairs_sql( using, TABLE, pairs, READY, [rule], after=after, count=TAKEN ) known = " OR ".join( f"EXISTS (SELECT 1 FROM {tables.name(using, model)} t " f"WHERE t.rule = %s AND t.{key} = v.a AND t.priority = v.b)" for model in ("KeyTurn", "KeyNews") ) -> known = \' OR \'.join((f\'EXISTS (SELECT 1 FROM {tables.name(using, model)} t WHERE t.rule = %s AND t.{key} = v.a AND t.priority = v.b)\' for model in (\'KeyTurn\', \'KeyNews\'))) source, params = database.distinct_pairs_sql(using, TABLE, pairs, READY, [rule], after=after, count=TAKEN)',
        "dispatch/release_pass.py remember: passes = {name: row.passes + (name in changed) for name, row in rows.items()} memos = {name: {**rows[name].memo, \"group\": group} for name in changed} -> memos = {name: {**rows[name].memo, 'group': group} for name in changed} passes = {name: row.passes + (name in changed) for name, row in rows.items()}",
        "execution/recorder.py _wait_for_database: connections[using].close() time.sleep(pause) -> time.sleep(pause) connections[using].close()",
        "ledger/settings.py _lock_stated: database.set_idle_timeout(using, rule_rows.SILENT) rows = tables.settings_state(using) -> rows = tables.settings_state(using) database.set_idle_timeout(using, rule_rows.SILENT)",
    ],
    "Where the two are equal, both ways give the same.": [
        "ledger/tallies.py BucketTallies.suits: limit.window_us > SHORT_BUCKET -> (limit.window_us >= SHORT_BUCKET)",
        "ledger/tallies.py Tallies.is_current: behind <= longest_lag(self.limit) -> (behind < longest_lag(self.limit))",
        "ledger/tally_rows.py _left_sql: leaving.ahead > leaving.end -> (leaving.ahead >= leaving.end)",
        "transitions/verbs.py clock_correction: timedelta(0) <= by <= TOLERANCE -> (timedelta(0) < by <= TOLERANCE)",
        "limits/kinds/token_bucket.py TokenBucket.level_at: until > at -> (until >= at)",
    ],
    "A monotonic clock shows more than a second.": [
        "dispatch/next_look.py RuleGroup.wake: 0.0 -> 1.0",
        "dispatch/dispenser.py Dispenser.__init__: 0.0 -> 1.0",
    ],
    "What is read besides is passed over.": [
        "ledger/ready_calls.py take_news: _turns(using).filter(rule__in=rules, key__in={key for _, _, key in named}) -> _turns(using).filter(key__in={key for _, _, key in named})",
        "ledger/ready_calls.py take_news: _turns(using).filter(rule__in=rules, key__in={key for _, _, key in named}) -> _turns(using).filter(rule__in=rules)",
        "dispatch/choosing.py _may_lack_workers: False -> True",
    ],
    "It rests between two looks.": [
        "ledger/settings.py set_rate: time.sleep(PAUSE) -> pass",
    ],
    "Its digits are more than a key may have in any case.": [
        "sending/validation.py _checked_key_part: abs(value) < 10**MAX_TEXT -> (abs(value) <= 10 ** MAX_TEXT)",
    ],
    "A longer digest tells the same budgets apart.": [
        "ledger/tally_rows.py fingerprint: 16 -> 17",
    ],
    "Only MariaDB needs it, whose tests find it.": [
        "ledger/ledger_time.py _has_waited: clocks.TOLERANCE / 1_000_000 -> (clocks.TOLERANCE * 1000000)",
    ],
    "It is a bound that nobody relies on to the last one.": [
        "execution/connection.py _Head.read1: 0 -> 1",
        "sending/intake.py rule_of_host: 255 -> 256",
        "dispatch/chores.py Chores.maintain: now >= chore.due_at -> (now > chore.due_at)",
        "ledger/settings.py Party._look_for_silent: moment - self._looked_at < GAP -> (moment - self._looked_at <= GAP)",
        "dispatch/dispenser.py stand_by: now - _told.get(using, -HEARTBEAT) >= HEARTBEAT -> (now - _told.get(using, -HEARTBEAT) > HEARTBEAT)",
        "execution/request.py _columns_of_answer: size + len(content) >= LARGE -> (size + len(content) > LARGE)",
        "execution/flight.py Flight._take_ended: now - self.last_seen_at >= QUIET -> (now - self.last_seen_at > QUIET)",
        "ledger/ledger_time.py Watch.keep_and_narrow: reading.after - last.before <= clocks.FRESH -> (reading.after - last.before < clocks.FRESH)",
        "ledger/ready_calls.py rules_named_by_ready: 1000 -> 1001",
        "ledger/ready_calls.py forget_news: 1000 -> 1001",
        "ledger/settings.py _Sign.is_silent: moment - self.since > SILENCE -> (moment - self.since >= SILENCE)",
        "limits/kinds/token_bucket.py TokenBucket.window_us: 100 -> 101",
        "dispatch/turns.py KeysInTurn._room_of_key: 1 -> 2",
        "ledger/settings.py _Sign.is_silent: now - self.at > LONG_SILENCE -> (now - self.at >= LONG_SILENCE)",
        "execution/wire.py _Idle.close_idle_since: self[0].idle_since < instant -> (self[0].idle_since <= instant)",
        "dispatch/choosing.py _nobody_listens: 2 -> 3",
        "limits/kinds/windows.py FixedWindow.window_us: 2 -> 3",
    ],
    "What is woken besides is looked at, and waits again.": [
        "dispatch/choosing.py rooms_of_workers: sum(own.values()) < len(listed) -> (sum(own.values()) <= len(listed))",
        "ledger/ready_calls.py wake_key: _turns(using).filter(rule=rule, priority=priority, key=key) -> _turns(using).filter(rule=rule, key=key)",
    ],
    "The two are as long as each other.": [
        "ledger/tallies.py advance: True -> False",
        "ledger/account.py Account._read_open: True -> False",
    ],
    "Who makes the row has it locked.": [
        "ledger/ledger_time.py Watch._follow_jump: ensure_rows(self.using) list(database.locked(tables.ledger_state(self.using).order_by(\"pk\"), wait=True)) -> list(database.locked(tables.ledger_state(self.using).order_by('pk'), wait=True)) ensure_rows(self.using)",
    ],
    "Whatever is greater will do.": [
        "execution/connection.py SecureConnection._has_unread: 1 -> 2",
        "ledger/settings.py _raise_version: 1 -> 2",
    ],
    "What is so large is refused in any case.": [
        "sending/validation.py _Copying._count_bytes: self.least > 4 * self.max_bytes -> (self.least >= 4 * self.max_bytes)",
    ],
    "Every Django that it runs with says so itself.": [
        "permits/apart.py is_in_callers_transaction: False -> True",
    ],
    "An address is looked up nowhere.": [
        "execution/connection.py allowed_addresses: socket.getaddrinfo( str(address), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST ) -> socket.getaddrinfo(str(address), port, type=socket.SOCK_STREAM)",
    ],
    "Of what has not ended nothing is owed.": [
        "transitions/verbs.py end_deferred: {columns[\"status\"] for columns in ended} & set(FINAL) -> ({columns['status'] for columns in ended} | set(FINAL))",
    ],
    "No adapter of ours asks for it.": [
        "execution/wire.py _send: _session.get_adapter(url).send( prepared, stream=True, verify=trip.policy.verify, proxies={} ) -> _session.get_adapter(url).send(prepared, stream=True, verify=trip.policy.verify)",
    ],
    "It is a microsecond more.": [
        "ledger/ledger_time.py Watch._follow_jump: 0 -> 1",
        "ledger/tallies.py counting_times: 0 -> 1",
    ],
    "What is written is what is there.": [
        'ledger/ready_calls.py wake_key: own.exclude(blocked_on="") -> own.exclude()',
    ],
    "Ledger time that is right is not mended.": [
        "ledger/ledger_time.py mend: jump.by < 0 -> (jump.by <= 0)",
    ],
}
EQUIVALENT: dict[str, str] = {text: why for why, texts in _BY_REASON.items() for text in texts}
