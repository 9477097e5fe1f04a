/* What is done for each row of a batch: a few steps, made once a call from the columns, and run row by row.
 *
 * A step may write up to OVERSHOOT bytes beyond what it gives back: whole words where a header or a value ends
 * in the midst of one. What comes there is written afterwards, and row_most() keeps that much free behind a row.
 */
#ifndef TRAINYARD_STEPS_H
#define TRAINYARD_STEPS_H

#include "bytes.h"
#include "columns.h"
#include "wire.h"

enum { STEP_FIXED, STEP_INT, STEP_BYTES, STEP_FLOATS, STEP_INTS, STEP_STRINGS };
enum { OVERSHOOT = 64, WORDS = 3 }; /* short headers are copied by so many words at least */
enum { ROWS = 16 };                 /* encoded together: 4-byte values of so many fill a line of the cache */

typedef struct {
    const u8 *from;
    i64 width; /* bytes a row */
    i64 at;    /* in the template */
} patch;

typedef struct {
    i64 kind;
    const column *c;
    u8 *text; /* a header or, for STEP_FIXED, several with gaps for the values */
    i64 size;
    u8 *plus; /* a short header's: 1 where a length stands that grows with the value; or null */
    i64 words;
    patch *patches;
    i64 patch_count;
    u8 **places; /* STEP_FIXED: where its text went in each of ROWS rows */
} step;

typedef struct {
    step *steps;
    i64 count;
    i64 row_room; /* what a row takes at most, but for values of no fixed length */
} program;

/* What a step gives back that had too little room for its value; null is for offsets that lie. */
static u8 full_mark;
#define FULL (&full_mark)

/* Bytes that a header takes at most: five tags and lengths below 2**35, and the key. */
static inline i64 header_most(const column *c) { return c->key_size + 5 * 6; }

/* Whether all lengths of a header are one byte, as long as its value is short. */
static inline int is_short(const column *c) { return c->key_size <= 96; }

/* Bytes of the value of every row; -1 where they differ, or are too many to be copied twice. */
static i64 fixed_width(const column *c) {
    i64 width = -1;
    if (c->valid) return -1;
    if (!c->is_list) {
        if (c->value == FLOAT) width = 4;
        if (c->value == BYTES && !c->offset_width) width = c->size;
    } else if (!c->list_width && c->value == FLOAT) {
        width = 4 * c->list_size;
    }
    return width <= 64 ? width : -1;
}

static i64 step_kind(const column *c) {
    if (fixed_width(c) >= 0) return STEP_FIXED;
    if (c->is_list) return c->value == FLOAT ? STEP_FLOATS : c->value == INT64 ? STEP_INTS : STEP_STRINGS;
    return c->value == FLOAT ? STEP_FLOATS : c->value == INT64 ? STEP_INT : STEP_BYTES;
}

/* Bytes of a row that don't depend on its values: what must be free before one is begun. */
static i64 row_most(const column *columns, i64 n) {
    i64 total = 12 + 1 + 10 + 4 + OVERSHOOT;
    for (i64 i = 0; i < n; i++) {
        const column *c = columns + i;
        i64 width = fixed_width(c);
        total += is_short(c) && !c->is_list && c->value != BYTES ? c->key_size + 10 : header_most(c);
        total += width >= 0 ? width : 10;
    }
    return total;
}

/* Bytes of memory that the texts of all steps take at most. */
static i64 text_most(const column *columns, i64 n) {
    i64 total = 0;
    for (i64 i = 0; i < n; i++) {
        i64 width = fixed_width(columns + i);
        total += 2 * (header_most(columns + i) + 8 * WORDS + 8) + (width > 0 ? width : 0);
    }
    return total;
}

/* Bytes of memory that a program takes, but for the structure itself. */
static i64 program_most(const column *columns, i64 n) {
    i64 each = (i64)(sizeof(step) + sizeof(patch) + ROWS * sizeof(u8 *));
    return (n + 1) * each + text_most(columns, n);
}

/* Make the program in `memory` of program_most() bytes. */
static program put_program(const column *columns, i64 n, u8 *memory) {
    step *steps = (step *)memory, *run = NULL;
    patch *patches = (patch *)(steps + n + 1);
    u8 **places = (u8 **)(patches + n + 1), *text = (u8 *)(places + ROWS * (n + 1));
    program g = {steps, 0, row_most(columns, n)};
    for (i64 i = 0; i < n; i++) {
        const column *c = columns + i;
        i64 kind = step_kind(c), width = fixed_width(c);
        u8 *end = text;
        if (kind != STEP_FIXED || !run) {
            run = steps + g.count++;
            *run = (step){kind, c, text, 0, NULL, 0, patches, 0, places};
            places += ROWS;
        }
        if (kind == STEP_FIXED) {
            /* An empty list has no head; one value of bytes has one always. */
            end = put_header(text, c, (u64)width, width > 0 || c->value == BYTES);
            run->patches[run->patch_count++] = (patch){c->data, width, run->size + (end - text)};
            patches++;
            memset(end, 0, (size_t)width);
            end += width;
            run->size += end - text;
        } else {
            if (is_short(c) && !c->is_list) {
                u64 least = kind == STEP_INT ? 1 : kind == STEP_FLOATS ? 4 : 0;
                run->size = put_header(text, c, least, 1) - text;
                run->words = (run->size + 7) / 8 > WORDS ? (run->size + 7) / 8 : WORDS;
                run->plus = text + 8 * run->words;
                memset(text + run->size, 0, (size_t)(16 * run->words - run->size));
                /* Lengths of the entry, the feature, the list and its payload. */
                run->plus[1] = 1;
                for (i64 back = 1; back <= 5; back += 2) run->plus[run->size - back] = 1;
                end = text + 16 * run->words;
            }
            run = NULL;
        }
        text = end;
    }
    return g;
}

/* Ask for the numbers and offsets of ROWS rows ahead of their time: more columns than the CPU follows by itself. */
static inline void fetch_rows(const program *g, i64 row) {
    for (const step *s = g->steps; s < g->steps + g->count; s++) {
        if (s->kind == STEP_FIXED) {
            for (const patch *h = s->patches; h < s->patches + s->patch_count; h++)
                __builtin_prefetch(h->from + h->width * row);
        } else if (s->kind == STEP_INT) {
            __builtin_prefetch(s->c->data + 8 * row);
            __builtin_prefetch(s->c->data + 8 * row + 64);
        } else if (s->kind == STEP_BYTES && s->c->offset_width) {
            const u8 *offset = s->c->offsets + s->c->offset_width * row;
            __builtin_prefetch(offset);
            __builtin_prefetch(s->c->data + offset_at(offset, s->c->offset_width, 0));
        }
    }
}

/* A short header whose lengths are greater by `by`; no length comes to 128, so no byte carries into another. */
static inline u8 *put_short(u8 *p, const step *s, u64 by) {
    for (i64 i = 0; i < WORDS; i++) store64(p + 8 * i, load64(s->text + 8 * i) + by * load64(s->plus + 8 * i));
    for (i64 i = WORDS; i < s->words; i++)
        store64(p + 8 * i, load64(s->text + 8 * i) + by * load64(s->plus + 8 * i));
    return p + s->size;
}

static inline u8 *put_fixed(u8 *p, const step *s, i64 place) {
    memcpy(p, s->text, (size_t)s->size);
    s->places[place] = p;
    return p + s->size;
}

/* The values of STEP_FIXED of some rows, column by column: by rows, columns of one length, which often lie so that
 * all want the same few places of the CPU's cache, would drive each other out with every value. */
static void put_patches(const program *g, i64 row, i64 rows) {
    for (const step *s = g->steps; s < g->steps + g->count; s++) {
        if (s->kind != STEP_FIXED) continue;
        u8 *places[ROWS]; /* of its own, so that the compiler sees that no value is written over it */
        memcpy(places, s->places, sizeof places);
        for (i64 k = 0; k < s->patch_count; k++) {
            const patch h = s->patches[k];
            if (h.width == 4 && rows == ROWS) {
                u32 values[ROWS];
                memcpy(values, h.from + 4 * row, sizeof values);
                for (i64 i = 0; i < ROWS; i++) memcpy(places[i] + h.at, values + i, 4);
            } else if (h.width) {
                for (i64 i = 0; i < rows; i++)
                    memcpy(places[i] + h.at, h.from + h.width * (row + i), (size_t)h.width);
            }
        }
    }
}

static inline u8 *put_int(u8 *p, const step *s, i64 row) {
    u64 v = load64(s->c->data + 8 * row);
    i64 size = varint_size(v);
    p = s->plus ? put_short(p, s, (u64)size - 1) : put_header(p, s->c, (u64)size, 1);
    return put_value(p, v, size);
}

/* `left` is what is free at p beyond what the rest of the row's headers need. */
static inline u8 *put_bytes(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    const u8 *from;
    i64 size;
    if (!bytes_at(c, row, &from, &size)) return NULL;
    if (size > left) return FULL;
    p = s->plus && s->text[1] + size < 128 ? put_short(p, s, (u64)size) : put_header(p, c, (u64)size, 1);
    if (size <= 16 && from - c->data + 16 <= c->data_size)
        memcpy(p, from, 16);
    else if (size)
        memcpy(p, from, (size_t)size);
    return p + size;
}

static u8 *put_floats(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    if (!c->is_list) {
        p = s->plus ? put_short(p, s, 0) : put_header(p, c, 4, 1);
        memcpy(p, c->data + 4 * row, 4);
        return p + 4;
    }
    i64 a, b;
    if (!list_at(c, row, &a, &b)) return NULL;
    if (4 * (b - a) > left) return FULL;
    p = put_header(p, c, (u64)(4 * (b - a)), b > a);
    if (b > a) memcpy(p, c->data + 4 * a, (size_t)(4 * (b - a)));
    return p + 4 * (b - a);
}

static u8 *put_ints(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    i64 a, b;
    u64 size = 0;
    if (!list_at(c, row, &a, &b)) return NULL;
    for (i64 i = a; i < b; i++) size += (u64)varint_size(load64(c->data + 8 * i));
    if ((i64)size > left) return FULL;
    p = put_header(p, c, size, b > a);
    for (i64 i = a; i < b; i++) p = put_varint(p, load64(c->data + 8 * i));
    return p;
}

static u8 *put_strings(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    const u8 *from;
    i64 a, b, size;
    u64 total = 0;
    if (!list_at(c, row, &a, &b)) return NULL;
    for (i64 i = a; i < b; i++) {
        if (!bytes_at(c, i, &from, &size)) return NULL;
        total += 1 + (u64)varint_size((u64)size) + (u64)size;
    }
    if ((i64)total > left) return FULL;
    p = put_header(p, c, total, 0);
    for (i64 i = a; i < b; i++) {
        bytes_at(c, i, &from, &size);
        *p++ = 0x0A;
        p = put_varint(p, (u64)size);
        if (size) memcpy(p, from, (size_t)size);
        p += size;
    }
    return p;
}

#endif
