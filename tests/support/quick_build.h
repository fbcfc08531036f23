// The planner's sources define static objects of the same names, which one source cannot. Each source's get a name of
// their own here.
#define JOIN_EXPANDED(name, suffix) name##suffix
#define JOIN(name, suffix) JOIN_EXPANDED(name, suffix)
#define _plugin JOIN(_plugin, UNIQUE_TO_SOURCE)
#define _type_plugin JOIN(_type_plugin, UNIQUE_TO_SOURCE)
#define _parse JOIN(_parse, UNIQUE_TO_SOURCE)
