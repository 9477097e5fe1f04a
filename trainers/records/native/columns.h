/* Columns of a batch as Arrow's buffers hold them, and their values by row, each checked before it is used. */
#ifndef TRAINYARD_COLUMNS_H
#define TRAINYARD_COLUMNS_H

#include "bytes.h"

enum { FLOAT = 0, INT64 = 1, BYTES = 2 };

/* Must be the same as FIELDS in describe.py. */
typedef struct {
    i64 value;               /* FLOAT, INT64 or BYTES */
    const u8 *data;          /* the values: 4 or 8 bytes each, or the bytes that `offsets` cut */
    i64 data_size;           /* bytes at `data` */
    const u8 *offsets;       /* BYTES: where each value starts, and the end of the last; or null */
    i64 offset_width;        /* 4 or 8; 0: every value has `size` bytes */
    i64 size;
    i64 items;               /* values at hand: as many as rows, or those of all lists */
    i64 is_list;
    const u8 *list_offsets;  /* lists: the first item of each, and the end of the last; or null */
    i64 list_width;          /* 4 or 8; 0: every list has `list_size` items */
    i64 list_size;
    const u8 *valid;         /* a bit a row, or null where all rows have a value */
    i64 valid_at;            /* the bit of row 0 */
    const u8 *key;
    i64 key_size;
} column;

static inline int is_valid(const column *c, i64 row) {
    if (!c->valid) return 1;
    u64 bit = (u64)(c->valid_at + row);
    return (c->valid[bit >> 3] >> (bit & 7)) & 1;
}

static inline i64 offset_at(const u8 *offsets, i64 width, i64 i) {
    if (width == 4) {
        int32_t v;
        memcpy(&v, offsets + 4 * i, 4);
        return v;
    }
    i64 v;
    memcpy(&v, offsets + 8 * i, 8);
    return v;
}

/* The bytes of item i; 0 when the offsets are not in order or lead out of the data. */
static inline int bytes_at(const column *c, i64 i, const u8 **from, i64 *size) {
    if (!c->offset_width) {
        *from = c->data + i * c->size;
        *size = c->size;
        return 1;
    }
    i64 a = offset_at(c->offsets, c->offset_width, i), b = offset_at(c->offsets, c->offset_width, i + 1);
    if (a < 0 || b < a || b > c->data_size) return 0;
    *from = c->data + a;
    *size = b - a;
    return 1;
}

static inline int list_at(const column *c, i64 row, i64 *first, i64 *end) {
    if (!c->list_width) {
        *first = row * c->list_size;
        *end = *first + c->list_size;
    } else {
        *first = offset_at(c->list_offsets, c->list_width, row);
        *end = offset_at(c->list_offsets, c->list_width, row + 1);
    }
    return *first >= 0 && *end >= *first && *end <= c->items;
}

/* Whether what a column says of itself fits together for so many rows. */
static int is_sound(const column *c, i64 rows) {
    const i64 most = (i64)1 << 34;
    if (c->value < FLOAT || c->value > BYTES || c->key_size < 0 || c->key_size > (1 << 24)) return 0;
    if (c->data_size < 0 || c->data_size > most || c->items < 0 || c->items > most) return 0;
    if (c->value == FLOAT && c->data_size / 4 < c->items) return 0;
    if (c->value == INT64 && c->data_size / 8 < c->items) return 0;
    if (c->value == BYTES) {
        if (c->offset_width != 0 && c->offset_width != 4 && c->offset_width != 8) return 0;
        if (!c->offset_width && (c->size < 0 || c->size > most)) return 0;
        if (!c->offset_width && c->size && c->data_size / c->size < c->items) return 0;
        if (c->offset_width && !c->offsets && c->items) return 0;
    }
    if (!c->is_list) return c->items == rows;
    if (c->list_width != 0 && c->list_width != 4 && c->list_width != 8) return 0;
    if (c->list_width) return c->list_offsets != NULL || !rows;
    return c->list_size >= 0 && (!c->list_size || c->items / c->list_size >= rows);
}

#endif
