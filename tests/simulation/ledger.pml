/*
 * The rule of the ledger, as docs/explanation/ledger.md states it, for spin: a window of W ticks that
 * admits N calls; two dispensers; workers, who may die; messages that are lost or come twice; leases
 * that end; a clock that is set, forward or back, and a ledger that is moved along.
 *
 * Each line of the loop is one atomic statement on the database, or one act of the world; spin tries
 * every order of them. `count` asserts the promise, by the provider's own record and true time.
 *
 * Each of these, defined, is a fault that spin must find:
 * NO_LOCK AGE_FROM_RELEASE FORGET_OPEN FORGET_AGED NO_FENCE VOID_BEGUN NO_SHIFT EARLY_SEND NO_LEASE NO_WATCH
 * The last three at other sizes than the rule is explored at (see test_model.py). A tick is as long as the
 * slack of a window that the ledger closes at both ends, so being early by one tick shows nothing: LEAD is 2.
 */

#ifndef N
#define N 2
#endif
#define W 2      /* ticks of a window */
#ifndef A
#define A 3      /* attempts */
#endif
#ifndef LEAD
#define LEAD 1   /* ticks ahead of its slot that one is released */
#endif
#define LEASE 1  /* ticks that a worker has, by its own clock; the ledger gives one more */
#ifndef END
#define END 5    /* ticks of true time */
#endif
#define J 3      /* ticks by which the clock is set */
#define EVENTS 6

#define FREE 0
#define OUT 1
#define BEGUN 2
#define OVER 3
#define VOID 4

byte now = 0;        /* true time */
byte clock = 8;      /* the database's */
byte st[A];
byte slot[A];        /* by the database's clock: may be sent from then on */
byte age[A];         /* ... ages from then on */
byte lease[A];       /* ... taken back, or ended, after it */
byte opens[A];       /* by the worker's own clock, which nobody sets: may be sent from then on */
byte ends[A];        /* ... and not after it */
byte msgs[A];        /* messages on their way */
byte hold[A];        /* workers that have begun it, and not sent it */
byte wire[A];        /* requests on their way */
bit counted[A];      /* the provider has counted it: it may answer */
byte rec[EVENTS];    /* the provider's record: when */
byte events = 0;
byte made = 0;
bit deciding[2];     /* a dispenser has counted, and not committed */
byte chosen[2];      /* for which instant */
bit jumped = 0, doubled = 0;
#ifdef NO_WATCH
bit after[2];        /* a dispenser has counted after the jump, which it did not see */
bit fresh[A];        /* released so: the ledger has its slot as the clock shows it now */
#define IS_OLD(a) !fresh[a]
#else
#define IS_OLD(a) true
#endif
short pending = 0;   /* by how much the clock was set that the ledger does not know of */

byte i, u, at;

inline room(instant) {
    u = 0; i = 0;
    do
    :: i < A ->
        if
#ifndef FORGET_OPEN
        :: st[i] == OUT || st[i] == BEGUN -> u++
#endif
#ifndef FORGET_AGED
        :: st[i] == OVER && age[i] + W >= instant -> u++
#endif
        :: else
        fi;
        i++
    :: else -> break
    od;
    i = 0
}

inline move(v) {  /* one instant that counts, along with the clock: never past now */
    if
    :: pending > 0 -> v = (v + pending < clock -> v + pending : clock)
    :: pending < 0 && v > clock -> v = clock
    :: else
    fi
}

inline act(a) {
    if
    :: atomic { msgs[a] > 0 -> msgs[a]-- }                                /* lost */
    :: atomic { msgs[a] == 1 && !doubled -> msgs[a] = 2; doubled = 1 }    /* repeated */
    :: atomic { msgs[a] > 0 && pending == 0 &&
#ifdef NO_FENCE
            (st[a] == OUT || st[a] == BEGUN) ->
#else
            st[a] == OUT ->
#endif
        msgs[a]--; st[a] = BEGUN; hold[a]++;
        opens[a] = now + (slot[a] > clock -> slot[a] - clock : 0);
        ends[a] = opens[a] + LEASE;
        lease[a] = (slot[a] > clock -> slot[a] : clock) + LEASE + 1 }     /* begin */
    :: atomic { hold[a] > 0 -> hold[a]-- }                                /* its worker dies */
    :: atomic { hold[a] > 0 &&
#ifndef EARLY_SEND
            now >= opens[a] &&
#endif
#ifndef NO_LEASE
            now <= ends[a] &&
#endif
            true -> hold[a]--; wire[a]++ }                                /* send */
    :: atomic { wire[a] > 0 -> wire[a]--;                                 /* count, or lost */
        if
#ifndef NO_LEASE
        :: now <= ends[a] ->
#else
        :: true ->
#endif
            counted[a] = 1; rec[events] = now; events++;
            u = 0; i = 0;
            do
            :: i < events -> if :: rec[i] + W > now -> u++ :: else fi; i++
            :: else -> break
            od;
            assert(u <= N);
            u = 0; i = 0
        :: true
        fi }
    :: atomic { st[a] == BEGUN && counted[a] && pending == 0 -> st[a] = OVER;  /* answer, record */
#ifdef AGE_FROM_RELEASE
        age[a] = slot[a] }
#else
        age[a] = clock }
#endif
    :: atomic { st[a] == OUT && clock > lease[a] && pending == 0 -> st[a] = VOID }
#ifdef VOID_BEGUN
    :: atomic { st[a] == BEGUN && !counted[a] && pending == 0 -> st[a] = VOID }
#endif
    :: atomic { st[a] == BEGUN && clock > lease[a] && pending == 0 ->     /* its worker is silent */
        st[a] = OVER; age[a] = clock }
    fi
}

inline dispense(d) {
    if
    :: atomic { !deciding[d] && made < A &&
#ifndef NO_LOCK
            !deciding[1 - d] &&
#endif
#ifndef NO_WATCH
            pending == 0 &&
#endif
            true ->
        at = clock; room(at);
        if :: u >= N -> at = clock + LEAD; room(at) :: else fi;
        if :: u < N -> deciding[d] = 1; chosen[d] = at :: else fi;
#ifdef NO_WATCH
        after[d] = (pending != 0);
#endif
        u = 0; at = 0 }
    :: atomic { deciding[d] -> deciding[d] = 0;
        if
        :: made < A -> st[made] = OUT; slot[made] = chosen[d];
#ifdef NO_WATCH
            fresh[made] = after[d];
#endif
            lease[made] = chosen[d] + LEASE; msgs[made] = 1; made++
        :: else
        fi;
        chosen[d] = 0 }
    fi
}

active proctype world() {
    do
    :: atomic { now < END -> now++; clock++ }
    :: atomic { !jumped -> jumped = 1; clock = clock + J; pending = J }
    :: atomic { !jumped -> jumped = 1; clock = clock - J; pending = -J }
    :: atomic { pending != 0 && !deciding[0] && !deciding[1] ->           /* whoever sees it first */
#ifndef NO_SHIFT
        do
        :: i < A ->
            move(age[i]);
            if
            :: !(IS_OLD(i)) -> skip
            :: IS_OLD(i) && pending > 0 -> slot[i] = slot[i] + pending; lease[i] = lease[i] + pending
            :: else ->
                if :: slot[i] > clock + J -> slot[i] = slot[i] - J
                :: slot[i] > clock && slot[i] <= clock + J -> slot[i] = clock :: else fi;
                if :: lease[i] > J -> lease[i] = lease[i] - J :: else fi
            fi;
            i++
        :: else -> break
        od;
        i = 0;
#endif
        pending = 0 }
    :: dispense(0)
    :: dispense(1)
    :: act(0)
    :: act(1)
#if A > 2
    :: act(2)
#endif
    od
}
