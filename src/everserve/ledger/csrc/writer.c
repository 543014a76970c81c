/* Events of plain streams: one token, one event, one commit, as connections.py and requests.py would write them.

   For each token:   journal <- token, its length   ring <- event, as a chunk   commit   ... and then, once per stream: send

   Everything is there before anything is stored: a token that needs more than this (another page, bytes that are no
   UTF-8, a token that was never spelled) is left to Python, and nothing of it has been done. */

#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_TOKEN_BYTES 512
#define CHOICE 0x40000000
#define COMMIT_BYTES 64 /* from one copy to the other */
#define CHECKED (UINT64_C(1) << 32)

enum outcome { WRITTEN, LEFT, UNSENT };

struct spelled {
    uint32_t at, size; /* at: the first byte + 1; 0 is a token that was never asked for */
};

struct vocabulary {
    const struct spelled *tokens;
    const uint8_t *bytes;
    int64_t num_tokens;
};

struct plain { /* writer.py: Plain */
    const struct vocabulary *vocabulary;
    uint32_t *journal, *journal_stop; /* the free part of its last page */
    uint64_t *length;                 /* of the journal, in its record */
    uint8_t *ring, *ring_stop;        /* the free part of its last page */
    uint8_t *unsent;                  /* in the ring */
    uint8_t *copies;                  /* of the commit */
    uint64_t *handling;               /* what the gateway is busy with */
    uint64_t reference;               /* of this connection */
    /* the commit, as it is stored */
    uint64_t seq, ring_end, num_rendered, journal_length, inbox_begin, request, flags;
    /* the event around its text */
    const uint8_t *before, *after;
    int64_t before_bytes, after_bytes;
    int64_t fd, num_written, num_characters, num_pending, is_left;
    uint64_t pending; /* the first bytes of a character */
};

static uint32_t crc_of_byte[256];

__attribute__((constructor)) static void prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_of_byte[byte] = crc;
    }
}

static uint64_t check_of(const uint8_t *bytes, int64_t size) {
    uint32_t crc = ~0u;
    for (int64_t i = 0; i < size; i++) crc = crc >> 8 ^ crc_of_byte[(crc ^ bytes[i]) & 255];
    return (uint64_t)(crc ^ ~0u) | CHECKED;
}

/* The memory is what a dead process leaves: no store may move before an earlier one. */
static void in_order(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

/* The size of the character that begins here; 0: its end is still to come; -1: it is none. */
static int size_of(const uint8_t *p, const uint8_t *end) {
    uint8_t least = 0x80, most = 0xBF;
    int size;
    if (*p < 0x80) return 1;
    if (*p >= 0xC2 && *p <= 0xDF) size = 2;
    else if (*p >= 0xE0 && *p <= 0xEF) size = 3;
    else if (*p >= 0xF0 && *p <= 0xF4) size = 4;
    else return -1;
    if (*p == 0xE0) least = 0xA0;
    if (*p == 0xED) most = 0x9F;
    if (*p == 0xF0) least = 0x90;
    if (*p == 0xF4) most = 0x8F;
    for (int i = 1; i < size; i++, least = 0x80, most = 0xBF) {
        if (p + i == end) return 0;
        if (p[i] < least || p[i] > most) return -1;
    }
    return size;
}

static const char *short_escape(uint8_t c) {
    switch (c) {
    case '"': return "\\\"";
    case '\\': return "\\\\";
    case '\b': return "\\b";
    case '\f': return "\\f";
    case '\n': return "\\n";
    case '\r': return "\\r";
    case '\t': return "\\t";
    default: return 0;
    }
}

/* One character as it stands in JSON. Returns the end. */
static uint8_t *escape(uint8_t *to, const uint8_t *p, int size) {
    const char *text = short_escape(*p);
    if (text) {
        memcpy(to, text, 2);
        return to + 2;
    }
    if (*p >= 0x20) {
        memcpy(to, p, size);
        return to + size;
    }
    memcpy(to, "\\u00", 4);
    to[4] = "0123456789abcdef"[*p >> 4];
    to[5] = "0123456789abcdef"[*p & 15];
    return to + 6;
}

/* The size of a chunk, and the end of that line. */
static uint8_t *begin_chunk(uint8_t *to, int64_t size) {
    int digits = 1;
    while (size >> 4 * digits) digits++;
    for (int i = digits - 1; i >= 0; i--) *to++ = "0123456789abcdef"[size >> 4 * i & 15];
    *to++ = '\r';
    *to++ = '\n';
    return to;
}

static uint8_t *put(uint8_t *to, const void *bytes, int64_t size) {
    memcpy(to, bytes, size);
    return to + size;
}

static void commit(struct plain *s) {
    s->seq++;
    uint8_t *copy = s->copies + (s->seq & 1) * COMMIT_BYTES;
    const int64_t size = (uint8_t *)(&s->flags + 1) - (uint8_t *)&s->seq;
    uint64_t check = check_of((uint8_t *)&s->seq, size);
    memcpy(copy, &s->seq, size);
    in_order();
    memcpy(copy + size, &check, sizeof check);
    in_order();
}

static enum outcome write_token(struct plain *s, int32_t token) {
    const struct vocabulary *v = s->vocabulary;
    if (s->is_left || token < 0 || token >= v->num_tokens || token >= CHOICE || !v->tokens[token].at) return LEFT;
    struct spelled spelled = v->tokens[token];
    if (spelled.size > MAX_TOKEN_BYTES || s->journal == s->journal_stop) return LEFT;

    uint8_t bytes[MAX_TOKEN_BYTES + 8], text[6 * (MAX_TOKEN_BYTES + 8)];
    memcpy(bytes, &s->pending, s->num_pending);
    memcpy(bytes + s->num_pending, v->bytes + spelled.at - 1, spelled.size);
    const uint8_t *p = bytes, *end = bytes + s->num_pending + spelled.size;
    uint8_t *text_end = text;
    int64_t num_characters = 0;
    int size = 0;
    for (; p < end && (size = size_of(p, end)) > 0; p += size, num_characters++) text_end = escape(text_end, p, size);
    if (size < 0) return LEFT;
    int64_t body = s->before_bytes + (text_end - text) + s->after_bytes;
    if (s->ring_stop - s->ring < body + 24) return LEFT;

    *s->handling = s->reference;
    *s->journal++ = (uint32_t)token;
    in_order();
    s->journal_length += sizeof *s->journal;
    *s->length = s->journal_length;
    in_order();
    uint8_t *to = begin_chunk(s->ring, body);
    to = put(to, s->before, s->before_bytes);
    to = put(to, text, text_end - text);
    to = put(to, s->after, s->after_bytes);
    to = put(to, "\r\n", 2);
    in_order();
    s->ring_end += to - s->ring;
    s->ring = to;
    s->num_rendered++;
    commit(s);
    s->num_written++;
    s->num_characters += num_characters;
    s->num_pending = end - p;
    s->pending = 0;
    memcpy(&s->pending, p, s->num_pending);
    return WRITTEN;
}

/* For each token what became of it. A stream that could not do one, or not send all, is left to Python with the rest. */
EXPORT int64_t es_ledger_write(struct plain *const *streams, const int32_t *tokens, int64_t num, uint8_t *outcomes) {
    int64_t num_left = 0;
    for (int64_t i = 0; i < num; i++) {
        outcomes[i] = write_token(streams[i], tokens[i]);
        if (outcomes[i] == LEFT) streams[i]->is_left = 1, num_left++;
    }
    for (int64_t i = 0; i < num; i++) {
        struct plain *s = streams[i];
        if (s->unsent == s->ring || s->is_left) continue; /* sent with an earlier token, or by Python */
        ssize_t sent = send(s->fd, s->unsent, s->ring - s->unsent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) s->unsent += sent;
        if (s->unsent != s->ring) s->is_left = 1, outcomes[i] = UNSENT, num_left++;
    }
    if (num) *streams[0]->handling = 0;
    return num_left;
}
