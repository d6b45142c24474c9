/* Names made of VARIANT. */
#ifndef NEURONSERVE_NAMES_H
#define NEURONSERVE_NAMES_H

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

#endif
