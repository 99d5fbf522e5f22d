/* The virtual clock of pipefit/simulator/clock.py, whose comments and names hold here too.
 *
 * Both give the same times to the last bit: they add, divide and compare the same doubles in the same order, and
 * simultaneous events happen in the same order. hatch_build.py compiles it.
 *
 * In a run of several steps, transfer t of step k is number k * transfers + t, and its parts and their uses of wires
 * are numbered in the same way.
 */

#include <stdint.h>
#include <stdlib.h>

enum { NOTHING, COMPUTE, POST, RECEIVE, COPY, JOIN };
enum { END, READY };

typedef struct {
    double time;
    int64_t number; /* of ends, to tell them apart; or of the transfer that is ready */
    int64_t part;   /* -1 if a transfer is ready */
    int32_t kind;
} Event;

typedef struct {
    /* the program of one step */
    int64_t devices, transfers, parts, uses, wires, streams;
    const int64_t *first_action;     /* of every device, and the end */
    const int8_t *codes;             /* of every action */
    const double *seconds;
    const int64_t *of_action;        /* its transfer, or -1 */
    const int64_t *first_part;       /* of every transfer, and the end */
    const int64_t *transfer;         /* of every part */
    const double *part_seconds;
    const int8_t *is_slowed;         /* whether the other direction slows a part */
    const int64_t *first_use;        /* of every part, and the end */
    const int64_t *part;             /* of every use */
    const int64_t *wire;
    const double *slowed;
    const int64_t *opposite;         /* of every wire, or -1 */
    const int64_t *stream;           /* of every transfer, or -1 */
    const int64_t *starters;         /* devices that must start a transfer */
} Program;

typedef struct {
    const Program *program;
    int64_t steps;
    double *after, *begins, *ends, *finished; /* results */
    /* devices */
    double *now;
    int64_t *at, *step, *next_waiting;
    /* transfers */
    double *posted, *issued;
    int64_t *missing, *first_waiting, *last_waiting, *parts_left, *next_issued;
    /* parts */
    double *left, *since, *speed, *end;
    int64_t *ahead;
    /* wires and streams: queues */
    int64_t *first_in_line, *last_in_line, *next_in_line; /* uses */
    int64_t *first_issued, *last_issued;
    int8_t *is_busy;
    /* events */
    Event *heap;
    int64_t events, room, serial;
    int failed;
} Clock;

/* ---- Heap of events: the earliest first, ends before ready transfers, then by number */

static int is_before(const Event *one, const Event *other) {
    if (one->time != other->time) return one->time < other->time;
    if (one->kind != other->kind) return one->kind < other->kind;
    return one->number < other->number;
}

static void push(Clock *clock, double time, int32_t kind, int64_t number, int64_t part) {
    if (clock->events == clock->room) {
        int64_t room = 2 * clock->room + 64;
        Event *larger = realloc(clock->heap, (size_t)room * sizeof(Event));
        if (larger == NULL) {
            clock->failed = 1;
            return;
        }
        clock->heap = larger;
        clock->room = room;
    }
    Event event = {time, number, part, kind};
    int64_t place = clock->events++;
    while (place > 0) {
        int64_t above = (place - 1) / 2;
        if (!is_before(&event, &clock->heap[above])) break;
        clock->heap[place] = clock->heap[above];
        place = above;
    }
    clock->heap[place] = event;
}

static Event pop(Clock *clock) {
    Event first = clock->heap[0], last = clock->heap[--clock->events];
    int64_t place = 0;
    for (;;) {
        int64_t below = 2 * place + 1;
        if (below >= clock->events) break;
        if (below + 1 < clock->events && is_before(&clock->heap[below + 1], &clock->heap[below])) below++;
        if (!is_before(&clock->heap[below], &last)) break;
        clock->heap[place] = clock->heap[below];
        place = below;
    }
    clock->heap[place] = last;
    return first;
}

/* ---- Parts of transfers, and their wires */

static int64_t part_of(const Clock *clock, int64_t use) {
    const Program *program = clock->program;
    return use / program->uses * program->parts + program->part[use % program->uses];
}

static int64_t transfer_of(const Clock *clock, int64_t part) {
    const Program *program = clock->program;
    return part / program->parts * program->transfers + program->transfer[part % program->parts];
}

/* The part that is running on a wire; -1 if there is none, or no wire */
static int64_t running(const Clock *clock, int64_t wire) {
    if (wire < 0 || clock->first_in_line[wire] < 0) return -1;
    int64_t part = part_of(clock, clock->first_in_line[wire]);
    return clock->ahead[part] ? -1 : part;
}

static void push_end(Clock *clock, int64_t part) {
    push(clock, clock->end[part], END, ++clock->serial, part);
}

static void set_speed(Clock *clock, int64_t part, double now) {
    const Program *program = clock->program;
    int64_t own = part % program->parts;
    double speed = 1.0;
    for (int64_t use = program->first_use[own]; use < program->first_use[own + 1]; use++) {
        double slowed = program->slowed[use];
        if (slowed < speed && running(clock, program->opposite[program->wire[use]]) >= 0) speed = slowed;
    }
    if (speed == clock->speed[part] && clock->end[part] >= 0.0) return;
    double left = clock->left[part] - (now - clock->since[part]) * clock->speed[part];
    clock->left[part] = left > 0.0 ? left : 0.0;
    clock->since[part] = now;
    clock->speed[part] = speed;
    clock->end[part] = now + clock->left[part] / speed;
    push_end(clock, part);
}

static void begin(Clock *clock, int64_t part, double now) {
    const Program *program = clock->program;
    int64_t own = part % program->parts, transfer = transfer_of(clock, part);
    if (clock->begins[transfer] < 0.0) clock->begins[transfer] = now;
    clock->since[part] = now;
    if (!program->is_slowed[own]) {
        clock->end[part] = now + clock->left[part];
        push_end(clock, part);
        return;
    }
    for (int64_t use = program->first_use[own]; use < program->first_use[own + 1]; use++) {
        int64_t other = running(clock, program->opposite[program->wire[use]]);
        if (other >= 0) set_speed(clock, other, now);
    }
    set_speed(clock, part, now);
}

static void ended(Clock *clock, int64_t transfer, double now);

static void queue(Clock *clock, int64_t transfer, double now) {
    const Program *program = clock->program;
    int64_t step = transfer / program->transfers, own = transfer % program->transfers;
    int64_t first = program->first_part[own], stop = program->first_part[own + 1];
    clock->parts_left[transfer] = stop - first;
    for (int64_t number = first; number < stop; number++) {
        int64_t part = step * program->parts + number;
        clock->left[part] = program->part_seconds[number];
        for (int64_t n = program->first_use[number]; n < program->first_use[number + 1]; n++) {
            int64_t use = step * program->uses + n, wire = program->wire[n];
            clock->next_in_line[use] = -1;
            if (clock->first_in_line[wire] >= 0) {
                clock->ahead[part]++;
                clock->next_in_line[clock->last_in_line[wire]] = use;
            } else {
                clock->first_in_line[wire] = use;
            }
            clock->last_in_line[wire] = use;
        }
        if (!clock->ahead[part]) begin(clock, part, now);
    }
    if (first == stop) {
        clock->begins[transfer] = now;
        ended(clock, transfer, now);
    }
}

static void end(Clock *clock, int64_t part, double now) {
    const Program *program = clock->program;
    int64_t own = part % program->parts;
    int64_t first = program->first_use[own], stop = program->first_use[own + 1];
    clock->left[part] = -1.0;
    for (int64_t use = first; use < stop; use++) {
        int64_t wire = program->wire[use];
        clock->first_in_line[wire] = clock->next_in_line[clock->first_in_line[wire]];
    }
    for (int64_t use = first; use < stop; use++) {
        int64_t wire = program->wire[use];
        if (clock->first_in_line[wire] < 0) continue;
        int64_t next = part_of(clock, clock->first_in_line[wire]);
        if (!--clock->ahead[next]) begin(clock, next, now);
    }
    for (int64_t use = first; program->is_slowed[own] && use < stop; use++) {
        int64_t hindered = running(clock, program->opposite[program->wire[use]]);
        if (hindered >= 0) set_speed(clock, hindered, now);
    }
    int64_t transfer = transfer_of(clock, part);
    if (!--clock->parts_left[transfer]) ended(clock, transfer, now);
}

/* ---- Devices and their transfers */

static void copy(Clock *clock, int64_t transfer, double now) {
    int64_t stream = clock->program->stream[transfer % clock->program->transfers];
    if (!clock->is_busy[stream]) {
        clock->is_busy[stream] = 1;
        push(clock, now, READY, transfer, -1);
        return;
    }
    clock->issued[transfer] = now;
    clock->next_issued[transfer] = -1;
    if (clock->first_issued[stream] >= 0) clock->next_issued[clock->last_issued[stream]] = transfer;
    else clock->first_issued[stream] = transfer;
    clock->last_issued[stream] = transfer;
}

static void post(Clock *clock, int64_t transfer, double now) {
    int64_t own = transfer % clock->program->transfers;
    double ready = clock->posted[transfer] > now ? clock->posted[transfer] : now;
    clock->posted[transfer] = ready;
    if (--clock->missing[transfer]) return;
    if (clock->program->first_part[own] < clock->program->first_part[own + 1])
        push(clock, ready, READY, transfer, -1);
    else
        clock->begins[transfer] = clock->ends[transfer] = ready;
}

static void wait_for(Clock *clock, int64_t device, int64_t transfer) {
    clock->next_waiting[device] = -1;
    if (clock->first_waiting[transfer] >= 0) clock->next_waiting[clock->last_waiting[transfer]] = device;
    else clock->first_waiting[transfer] = device;
    clock->last_waiting[transfer] = device;
}

static void advance(Clock *clock, int64_t device) {
    const Program *program = clock->program;
    int64_t first = program->first_action[device], count = program->first_action[device + 1] - first;
    int64_t at = clock->at[device], step = clock->step[device];
    double now = clock->now[device], *after = clock->after + first * clock->steps;
    while (step < clock->steps) {
        int64_t action = first + at, transfer = step * program->transfers + program->of_action[action];
        int8_t code = program->codes[action];
        if (code == JOIN) {
            double end = clock->ends[transfer];
            if (end < 0.0) {
                wait_for(clock, device, transfer);
                break;
            }
            if (end > now) now = end;
        } else if (code == COMPUTE) {
            now += program->seconds[action];
        } else if (code == COPY) {
            copy(clock, transfer, now);
            now += program->seconds[action];
        } else if (code != NOTHING) {
            post(clock, transfer, now);
            now += program->seconds[action];
        }
        after[step * count + at] = now;
        if (++at == count) {
            if (now > clock->finished[step]) clock->finished[step] = now;
            at = 0;
            step++;
        }
    }
    clock->now[device] = now;
    clock->at[device] = at;
    clock->step[device] = step;
}

static void ended(Clock *clock, int64_t transfer, double now) {
    clock->ends[transfer] = now;
    int64_t stream = clock->program->stream[transfer % clock->program->transfers];
    if (stream >= 0) {
        int64_t following = clock->first_issued[stream];
        clock->is_busy[stream] = following >= 0;
        if (following >= 0) {
            clock->first_issued[stream] = clock->next_issued[following];
            double issued = clock->issued[following];
            push(clock, now > issued ? now : issued, READY, following, -1);
        }
    }
    int64_t device = clock->first_waiting[transfer];
    clock->first_waiting[transfer] = -1;
    while (device >= 0) {
        int64_t next = clock->next_waiting[device];
        advance(clock, device);
        device = next;
    }
}

/* ---- The run */

/* The digest of this file when it was compiled, by which Python knows a stale library */
const char *clock_source(void) { return SOURCE; }

static void *filled(int64_t count, int64_t number) { /* integers of this value; NULL without memory */
    int64_t *result = malloc((size_t)(count + 1) * sizeof(int64_t));
    for (int64_t n = 0; result != NULL && n < count; n++) result[n] = number;
    return result;
}

static void *valued(int64_t count, double value) {
    double *result = malloc((size_t)(count + 1) * sizeof(double));
    for (int64_t n = 0; result != NULL && n < count; n++) result[n] = value;
    return result;
}

/* Run the program for some steps. Return 0; 1 if devices wait for each other for ever; 2 without memory.
 *
 * `after` has the ends of all actions, device by device and then step by step; `begins` and `ends` are those of the
 * transfers and `finished` those of the steps.
 */
int run_clock(const Program *program, int64_t steps, double *after, double *begins, double *ends, double *finished) {
    int64_t devices = program->devices, transfers = program->transfers * steps, parts = program->parts * steps;
    Clock clock = {.program = program, .steps = steps, .after = after, .begins = begins, .ends = ends,
                   .finished = finished};
    clock.now = valued(devices, 0.0);
    clock.posted = valued(transfers, 0.0);
    clock.issued = valued(transfers, 0.0);
    clock.left = valued(parts, 0.0);
    clock.since = valued(parts, 0.0);
    clock.speed = valued(parts, 1.0);
    clock.end = valued(parts, -1.0);
    clock.at = filled(devices, 0);
    clock.step = filled(devices, 0);
    clock.next_waiting = filled(devices, -1);
    clock.missing = filled(transfers, 0);
    clock.first_waiting = filled(transfers, -1);
    clock.last_waiting = filled(transfers, -1);
    clock.parts_left = filled(transfers, 0);
    clock.next_issued = filled(transfers, -1);
    clock.ahead = filled(parts, 0);
    clock.first_in_line = filled(program->wires, -1);
    clock.last_in_line = filled(program->wires, -1);
    clock.next_in_line = filled(program->uses * steps, -1);
    clock.first_issued = filled(program->streams, -1);
    clock.last_issued = filled(program->streams, -1);
    clock.is_busy = calloc((size_t)program->streams + 1, 1);
    clock.room = 64;
    clock.heap = malloc((size_t)clock.room * sizeof(Event));
    void *arrays[] = {
        clock.now, clock.posted, clock.issued, clock.left, clock.since, clock.speed, clock.end, clock.at, clock.step,
        clock.next_waiting, clock.missing, clock.first_waiting, clock.last_waiting, clock.parts_left,
        clock.next_issued, clock.ahead, clock.first_in_line, clock.last_in_line, clock.next_in_line,
        clock.first_issued, clock.last_issued, clock.is_busy,
    };
    int64_t count = sizeof arrays / sizeof arrays[0];
    clock.failed = clock.heap == NULL;
    for (int64_t n = 0; n < count; n++) clock.failed |= arrays[n] == NULL;
    if (!clock.failed) {
        for (int64_t n = 0; n < transfers; n++) {
            clock.missing[n] = program->starters[n % program->transfers];
            begins[n] = ends[n] = -1.0;
        }
        for (int64_t n = 0; n < steps; n++) finished[n] = 0.0;
        for (int64_t device = 0; device < devices; device++)
            if (program->first_action[device] < program->first_action[device + 1]) advance(&clock, device);
    }
    while (clock.events && !clock.failed) {
        Event event = pop(&clock);
        if (event.part < 0)
            queue(&clock, event.number, event.time);
        else if (clock.end[event.part] == event.time && clock.left[event.part] >= 0.0)
            end(&clock, event.part, event.time); /* otherwise its end has been computed again */
    }
    int result = clock.failed ? 2 : 0;
    for (int64_t device = 0; device < devices && !result; device++) {
        int works = program->first_action[device] < program->first_action[device + 1];
        if (works && clock.step[device] < steps) result = 1;
    }
    for (int64_t n = 0; n < count; n++) free(arrays[n]);
    free(clock.heap);
    return result;
}
