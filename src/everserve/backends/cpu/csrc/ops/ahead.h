#pragma once

#include <stddef.h>

/* Weights that will be needed soon are fetched into the second-level cache while others are computed with: each row is
   too short for the hardware to recognise a stream. While a panel of weights is used, once for every MR rows of a, the
   next panel is fetched, a part in each of these passes: memory is neither idle nor waited for.

       rows 0..3    panel 0: tile tile tile tile    fetched meanwhile: the first third of panel 1
       rows 4..7             tile tile tile tile                       the second
       rows 8..11            tile tile tile tile                       the last

   With one pass a panel is a tile. */
struct ahead {
    const char *following, *end; /* what is to be fetched in this pass, and where all weights end */
    size_t column_bytes;         /* of `following`, fetched for each column of the panel in this pass */
    size_t step_bytes;           /* likewise for each step along k, for NR columns */
};
