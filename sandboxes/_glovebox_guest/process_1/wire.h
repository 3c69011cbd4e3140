/* The guest's end of the wire (rules: _glovebox_guest/wire.py) as far as process 1 in C needs it: frames of the host
 * while a job runs, and the credit of the three streams it sends. Strict: what the host never sends to such a guest, or
 * writes otherwise, breaks a rule. No input or output, so that a test can feed it any bytes. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { MESSAGE = 1, OPEN, DATA, ACCEPT, END, RESET, WINDOW };
enum { HEADER = 9, MOST_JOB = 4 << 20, MOST_DATA = 256 << 10, MOST_CREDIT = 1 << 20, MOST_HELD = 64 << 10 };
enum { STDOUT, STDERR, RESULT, STREAMS };

/* Why the program is stopped, as the outcome says it. */
enum { NOT_STOPPED, STOPPED_TIME, STOPPED_OUTPUT, STOPPED_PROCESSOR, STOPS };
static const char *const STOP_NAMES[STOPS] = {"", "time", "output", "processor"};

/* All that the host says to such a guest beside credit: it stops the program, and it resets a stream. */
#define STOP "{\"kind\":\"stop\",\"body\":{\"reason\":\"processor\"}}"
#define REFUSED "{\"reason\":\"refused\"}"

struct stream {
    uint32_t id; /* 0 until it is opened */
    uint32_t credit;
    bool open;
};

struct wire {
    struct stream streams[STREAMS];
    uint32_t last; /* the highest id of ours: odd, or 0 */
    int stop;
    size_t held; /* bytes received and not taken yet */
    uint8_t bytes[MOST_HELD];
};

static uint32_t get_u32(const uint8_t *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static bool is_text(const uint8_t *payload, size_t length, const char *text) {
    return length == strlen(text) && memcmp(payload, text, length) == 0;
}

/* Take {"credit":N} of a WINDOW frame: 0 if it is anything else. */
static uint32_t credit_of(const uint8_t *payload, size_t length) {
    static const char begin[] = "{\"credit\":";
    const size_t before = sizeof begin - 1;
    uint32_t credit = 0;
    if (length < before + 2 || memcmp(payload, begin, before) != 0 || payload[length - 1] != '}') return 0;
    if (payload[before] == '0') return 0;
    for (size_t at = before; at < length - 1; at++) {
        if (payload[at] < '0' || payload[at] > '9' || credit > MOST_CREDIT) return 0;
        credit = credit * 10 + (payload[at] - '0');
    }
    return credit <= MOST_CREDIT ? credit : 0;
}

/* Take one whole frame of a running job. False if it breaks a rule. */
static bool take_frame(struct wire *wire, uint8_t type, uint32_t id, const uint8_t *payload, size_t length) {
    struct stream *known = NULL;
    if (type == MESSAGE && id == 0) {
        wire->stop = STOPPED_PROCESSOR;
        return is_text(payload, length, STOP);
    }
    if (type == MESSAGE || id % 2 == 0 || id > wire->last) return false;
    for (int each = 0; each < STREAMS; each++)
        if (wire->streams[each].id == id && wire->streams[each].open) known = &wire->streams[each];
    const uint32_t credit = type == WINDOW ? credit_of(payload, length) : 0;
    if (type == WINDOW ? credit == 0 : !is_text(payload, length, REFUSED)) return false;
    if (known == NULL) /* it has ended, and this has crossed its end */
        return true;
    if (type == RESET) {
        known->open = false;
        return true;
    }
    if (known->credit + credit > MOST_CREDIT) return false;
    known->credit += credit;
    return true;
}

/* Take all whole frames of what was received. False if the host broke a rule. */
static bool take_frames(struct wire *wire) {
    size_t at = 0;
    while (wire->held - at >= HEADER) {
        const uint8_t *frame = wire->bytes + at;
        const uint32_t length = get_u32(frame + 5);
        if (frame[0] != MESSAGE && frame[0] != RESET && frame[0] != WINDOW) return false;
        if (length > sizeof wire->bytes - HEADER) return false;
        if (wire->held - at < HEADER + length) break;
        if (!take_frame(wire, frame[0], get_u32(frame + 1), frame + HEADER, length)) return false;
        at += HEADER + length;
    }
    memmove(wire->bytes, wire->bytes + at, wire->held - at);
    wire->held -= at;
    return true;
}
