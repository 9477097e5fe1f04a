/* Arrow columns in, framed TFRecords of tf.train.Example out: the same bytes as trainers/records/encode.py.
 *
 * The caller (native/__init__.py) fills an array of `column`, sorted by key, with pointers into Arrow's buffers
 * that already count from the batch's first row, and an output buffer; a call encodes rows until all are done or
 * the buffer is full. So a batch may go out through a buffer that stays in the CPU's cache, piece by piece.
 *
 * Nothing is read or written outside of these: lengths come with every pointer, every offset that is read from a
 * buffer is checked before it is used, and room is checked before a row and before each value whose length is
 * not known beforehand. Nothing is allocated but the steps; there is no state, so threads may encode at once.
 *
 * TFRecord's frame, see TensorFlow's record_writer.h:
 *   record = length u64, masked CRC-32C of the length u32, Example, masked CRC-32C of the Example u32
 */
#include <stdlib.h>

#include "bytes.h"
#include "columns.h"
#include "crc32c.h"
#include "steps.h"
#include "wire.h"

#define EXPORT __attribute__((visibility("default")))
#ifndef TY_SOURCE
#define TY_SOURCE "unknown"
#endif

enum { BAD_OFFSETS = -2, NO_MEMORY = -3, BAD_COLUMN = -4 };

/* Rows whose checksums, and values of fixed width, are still to be put in. */
typedef struct {
    u8 *at[ROWS];
    u64 size[ROWS];
    i64 count;
} pending;

static void put_crcs(const crc_state *s, const pending *q) {
    i64 i = 0;
#if defined(HARDWARE)
    for (; s->hardware && i + 4 <= q->count; i += 4) {
        u32 out[4];
        crc_hard4((const u8 *const *)q->at + i, q->size + i, out);
        for (i64 k = 0; k < 4; k++) put_masked(q->at[i + k] + q->size[i + k], out[k]);
    }
#endif
    for (; i < q->count; i++) put_masked(q->at[i] + q->size[i], crc(s, q->at[i], q->size[i]));
}

/* One row's features at p, but for values of fixed width; or null or FULL. */
static inline u8 *put_row(u8 *p, const u8 *end, const program *g, i64 row, i64 place) {
    for (i64 i = 0; i < g->count; i++) {
        const step *s = g->steps + i;
        if (s->kind == STEP_FIXED) {
            p = put_fixed(p, s, place);
            continue;
        }
        if (!is_valid(s->c, row)) continue;
        i64 left = end - p - g->row_room;
        switch (s->kind) {
            case STEP_INT: p = put_int(p, s, row); break;
            case STEP_BYTES: p = put_bytes(p, s, row, left); break;
            case STEP_FLOATS: p = put_floats(p, s, row, left); break;
            case STEP_INTS: p = put_ints(p, s, row, left); break;
            default: p = put_strings(p, s, row, left); break;
        }
        if (!p || p == FULL) return p;
    }
    return p;
}

static i64 encode_rows(const program *g, i64 first, i64 rows, u8 *out, i64 capacity, i64 *offsets,
                       const crc_state *crcs) {
    u8 *p = out;
    const u8 *end = out + capacity;
    pending q = {{0}, {0}, 0};
    i64 guess = 2; /* bytes of the Example's own length: mostly those of the row before */
    i64 row = first;
    offsets[0] = 0;
    for (; row < rows && end - p >= g->row_room; row++) {
        if (!q.count && rows - row > 3 * ROWS) fetch_rows(g, row + 2 * ROWS);
        u8 *record = p, *body = p + 12 + 1 + guess;
        p = put_row(body, end, g, row, q.count);
        if (!p) return BAD_OFFSETS;
        if (p == FULL) break;
        u64 size = (u64)(p - body);
        i64 width = varint_size(size);
        if (width != guess) {
            memmove(record + 13 + width, body, size);
            p += width - guess;
            for (i64 i = 0; i < g->count; i++)
                if (g->steps[i].kind == STEP_FIXED) g->steps[i].places[q.count] += width - guess;
            guess = width;
        }
        record[12] = 0x0A;
        put_varint(record + 13, size);
        u64 length = 1 + (u64)width + size;
        store64(record, length);
        put_masked(record + 8, crc(crcs, record, 8));
        q.at[q.count] = record + 12;
        q.size[q.count++] = length;
        p += 4;
        offsets[row - first + 1] = p - out;
        if (q.count == ROWS) {
            put_patches(g, row + 1 - ROWS, ROWS);
            put_crcs(crcs, &q);
            q.count = 0;
        }
    }
    put_patches(g, row - q.count, q.count);
    put_crcs(crcs, &q);
    return row - first;
}

/* Bytes that a batch takes at most, with the slack that ty_encode wants; negative for bad columns. */
EXPORT i64 ty_bound(const column *columns, i64 n, i64 rows) {
    i64 total = 0;
    for (i64 i = 0; i < n; i++) {
        const column *c = columns + i;
        if (!is_sound(c, rows)) return BAD_COLUMN;
        if (c->value == BYTES && c->is_list) total += c->items * 6;
        if (c->value == BYTES && c->offset_width && c->items) {
            i64 a = offset_at(c->offsets, c->offset_width, 0);
            i64 b = offset_at(c->offsets, c->offset_width, c->items);
            if (a < 0 || b < a || b > c->data_size) return BAD_OFFSETS;
            total += b - a;
        } else if (c->value == BYTES && !c->offset_width) {
            total += c->items * c->size;
        } else if (c->is_list) {
            total += c->items * (c->value == FLOAT ? 4 : 10);
        }
    }
    return total + (rows + 1) * row_most(columns, n);
}

/* Encode rows from `first` on until all are done or `out` is full; how many, or a negative code.
 *
 * `offsets` takes where each record starts and where the last ends. 0: not even one row has room. */
EXPORT i64 ty_encode(const column *columns, i64 n, i64 first, i64 rows, u8 *out, i64 capacity, i64 *offsets,
                     int hardware) {
    if (first < 0 || first > rows) return BAD_COLUMN;
    for (i64 i = 0; i < n; i++)
        if (!is_sound(columns + i, rows)) return BAD_COLUMN;
    u8 *memory = malloc(sizeof(crc_state) + (size_t)program_most(columns, n));
    if (!memory) return NO_MEMORY;
    crc_state *crcs = (crc_state *)memory;
    crc_init(crcs, hardware);
    program g = put_program(columns, n, (u8 *)(crcs + 1));
    i64 done = encode_rows(&g, first, rows, out, capacity, offsets, crcs);
    free(memory);
    return done;
}

/* CRC-32C of some bytes, by the CPU's instruction or, when `hardware` is 0 or there is none, by tables. */
EXPORT u32 ty_crc32c(const u8 *data, i64 size, int hardware) {
    crc_state s;
    crc_init(&s, hardware);
    return crc(&s, data, (u64)size);
}

/* SHA-256 of the sources, as far as the build says: a library of another version is not used. */
EXPORT const char *ty_source(void) { return TY_SOURCE; }
